"""Where the rows of a batch lie on the devices."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Layout:
    """A batch buffer of `devices` x (`windows` * `rows`) rows of `length` tokens.

    The n-th trajectory of a batch goes to device n mod devices, so that every device fills at the same pace. One
    gradient call works on a window: `rows` neighbouring rows on every device at once.
    """

    devices: int
    rows: int
    windows: int
    length: int
    batch: int

    @classmethod
    def fit(cls, batch: int, length: int, devices: int, *, micro_rows: int | None = None) -> "Layout":
        """About 512 tokens a device and gradient call unless `micro_rows` (rows per device) is given."""
        if batch < 1:
            raise ValueError(f"batch size is {batch}; it must be at least 1")
        per_device = math.ceil(batch / devices)
        rows = min(micro_rows or max(1, 512 // length), per_device)
        return cls(devices, rows, math.ceil(per_device / rows), length, batch)

    @property
    def slots(self) -> int:
        """Rows per device."""
        return self.rows * self.windows

    def place(self, n: int) -> tuple[int, int]:
        """(device, slot) of the n-th trajectory of a batch."""
        return n % self.devices, n // self.devices

    def window(self, n: int) -> int:
        """The window that the n-th trajectory of a batch falls into."""
        return n // self.devices // self.rows

    def completes_window(self, n: int) -> bool:
        """Whether the n-th arrival (counted from 1) fills a window, or the batch."""
        return n == self.batch or n % (self.devices * self.rows) == 0
