"""Matrix products that round alike on every processor.

MKL chooses its kernels by the processor, and they differ by more than the tests compare two schedules to.
MKL's "conditional numerical reproducibility" gives the same kernels everywhere.
"""

import os

os.environ["MKL_CBWR"] = "COMPATIBLE"
