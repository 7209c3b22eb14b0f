"""sort and topk in kernels."""

UNSORTED = (
    "it has no rule there yet; sort outside the kernel, or keep the best few of a stream "
    "with jt.reduce and jt.topk_merge"
)
