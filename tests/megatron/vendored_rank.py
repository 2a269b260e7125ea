"""One rank with a patched Megatron: the CPU device, which must come first, then the script as it is.

`vendored_rank.py SCRIPT ARGS...`; Megatron's patched copy is on PYTHONPATH.
"""

import runpy
import sys


def main() -> None:
    """Install the device and run the script."""
    from quartet_plugin.megatron import cpu_device

    cpu_device.ensure_environment()
    cpu_device.install()
    del sys.argv[0]
    sys.argv += cpu_device.required_flags(set(sys.argv))
    runpy.run_path(sys.argv[0], run_name="__main__")
    cpu_device.exit_now()


if __name__ == "__main__":
    main()
