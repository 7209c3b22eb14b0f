"""The branches and loops of `simt.Machine`, whose threads go in step."""

import contextlib
from typing import Any

from simt_values import choose, signed


class Flow:
    """Handlers of structured control flow, which `Machine` finds by their names."""

    mask: Any
    block: Any
    set: Any

    @contextlib.contextmanager
    def _only(self, mask):
        saved, self.mask = self.mask, self.mask & mask
        yield
        self.mask = saved

    def op_scf_if(self, op, condition):
        sides = []
        for region, mask in zip(op.regions, (condition, ~condition), strict=True):
            with self._only(mask):
                some = len(region.blocks) and self.mask.any()
                sides.append(self.block(region.blocks[0]) if some else None)
        if not len(op.results):
            return []
        then, other = sides
        if then is None or other is None:
            found = then or other
        else:
            found = [choose(condition, a, b) for a, b in zip(then, other, strict=True)]
        return found[0] if len(op.results) == 1 else found

    def op_scf_for(self, op, low, high, step, *carry):
        body, carry = op.regions[0].blocks[0], list(carry)
        index = low.copy()
        while (going := self.mask & (signed(index) < signed(high))).any():
            with self._only(going):
                for argument, v in zip(body.arguments, [index, *carry], strict=True):
                    self.set(argument, v)
                new = self.block(body)
            carry = [choose(going, a, b) for a, b in zip(new, carry, strict=True)]
            index = index + step
        return carry[0] if len(op.results) == 1 else carry

    def op_scf_while(self, op, *carry):
        test, body = (region.blocks[0] for region in op.regions)
        carry, going = list(carry), self.mask

        def run(block):
            for argument, v in zip(block.arguments, carry, strict=True):
                self.set(argument, v)
            return self.block(block)

        while True:
            with self._only(going):
                more, *values = run(test)
            carry = [choose(going, a, b) for a, b in zip(values, carry, strict=True)]
            going = going & more
            if not going.any():
                return carry[0] if len(op.results) == 1 else carry
            with self._only(going):
                new = run(body)
            carry = [choose(going, a, b) for a, b in zip(new, carry, strict=True)]
