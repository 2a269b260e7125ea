"""Matrix products that round alike on every processor: MKL's kernels differ between processors by more than the
parity of two schedules is compared to (its "conditional numerical reproducibility" fixes the kernel)."""

import os

os.environ["MKL_CBWR"] = "COMPATIBLE"
