"""The main module of a spawned child: installs the CPU device, then runs the parent's main module.

Run by multiprocessing under the name `__mp_main__`, never imported. See `spawn` beside this file.
"""

import runpy
import sys

from quartet_plugin.megatron.cpu_device import install
from quartet_plugin.megatron.cpu_device.spawn import MARK

if sys.argv[1:2] == [MARK]:
    _loop, _kind, _main = sys.argv[2:5]
    del sys.argv[1:5]
    install(training=bool(_loop))
    # What multiprocessing itself does with the two, whose names then stand in this module.
    if _kind == "init_main_from_path":
        globals().update(runpy.run_path(_main, run_name="__mp_main__"))
    elif _kind == "init_main_from_name" and not (_main == "__main__" or _main.endswith(".__main__")):
        globals().update(runpy.run_module(_main, run_name="__mp_main__", alter_sys=True))
