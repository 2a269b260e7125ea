"""The plugin's entry in which one seam, named by the environment, is not replaced."""

import os

from quartet_plugin.megatron import entry, seams

DROPPED = "QUARTET_TEST_DROPPED_SEAM"


def main() -> None:
    """Install everything but one hook, and train."""
    install, dropped = seams.install, os.environ[DROPPED]

    def install_others(wrappers):  # type: ignore[no-untyped-def]
        kept = {seam: wrapper for seam, wrapper in wrappers.items() if seam.name != dropped}
        assert dropped == "none" or len(kept) < len(wrappers)
        return install(kept)

    seams.install = install_others
    entry.main()


if __name__ == "__main__":
    main()
