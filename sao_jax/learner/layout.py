"""Where the rows of a batch lie on the devices."""

import dataclasses
import math

from sao_jax.data.packing import Packing


@dataclasses.dataclass(frozen=True)
class Layout:
    """A batch buffer of `devices` x (`windows` * `rows`) rows of `length` tokens, for `batch` trajectories of up to
    `most` rows each.

    The n-th row of a batch goes to device n mod devices, so that every device fills at the same pace, and the rows of
    one trajectory are trained by all of them. One gradient call works on a window: `rows` neighbouring rows on every
    device at once.

    With `pieces` above 1 that many rows of the buffer, then called pieces, share a row of a window where their tokens
    fit it; their places are those of `packing`, and those that follow here do not apply.

    With `buckets` above 1 a window whose rows are all short is computed at a half, a quarter, ... of their length: so
    many lengths are compiled.
    """

    devices: int
    rows: int
    windows: int
    length: int
    batch: int
    most: int = 1
    pieces: int = 1
    buckets: int = 1

    @classmethod
    def fit(
        cls,
        batch: int,
        length: int,
        devices: int,
        *,
        micro_rows: int | None = None,
        most: int = 1,
        pieces: int = 1,
        buckets: int = 1,
    ) -> "Layout":
        """About 512 tokens a device and gradient call unless `micro_rows` (rows per device) is given."""
        if batch < 1:
            raise ValueError(f"batch size is {batch}; it must be at least 1")
        per_device = math.ceil(batch * most / devices)
        rows = min(micro_rows or max(1, 512 // length), per_device)
        return cls(devices, rows, math.ceil(per_device / rows), length, batch, most, pieces, buckets)

    @property
    def capacity(self) -> int:
        """Rows that a batch may have."""
        return self.batch * self.most

    @property
    def slots(self) -> int:
        """Rows per device."""
        return self.rows * self.windows

    @property
    def packed(self) -> bool:
        return self.pieces > 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths that a window may be computed at, the longest first."""
        return tuple(-(-self.length // 2**n) for n in range(self.buckets))

    def bucket(self, tokens: int) -> int:
        """The shortest of `lengths` that holds rows of so many tokens."""
        return min(length for length in self.lengths if length >= tokens)

    def packing(self) -> Packing:
        """Places for the pieces of a batch."""
        return Packing(self.devices, self.rows, self.slots, self.length, self.pieces)

    def place(self, n: int) -> tuple[int, int]:
        """(device, slot) of the n-th row of a batch."""
        return n % self.devices, n // self.devices

    def window(self, n: int) -> int:
        """The window that the n-th row of a batch falls into."""
        return n // self.devices // self.rows

    def rows_of(self, window: int) -> range:
        """The rows of a batch that fall into a window."""
        size = self.devices * self.rows
        return range(window * size, (window + 1) * size)

    def completes_window(self, n: int, before: int | None = None) -> bool:
        """Whether the arrival that brings the batch to n rows (from `before`; n - 1) fills a window, or the batch."""
        size = self.devices * self.rows
        return n == self.capacity or n // size > (n - 1 if before is None else before) // size
