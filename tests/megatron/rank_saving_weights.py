"""One rank of a test as `rank_on_cpu`, whose checkpoint is written without another process."""

from tests.megatron import rank_on_cpu


def main() -> None:
    """Install the device before Megatron is imported, and train."""
    from quartet_plugin.megatron import cpu_device

    cpu_device.ensure_environment()
    cpu_device.install()
    from tests.megatron.local_writer import local_writer

    with local_writer():
        rank_on_cpu.main()


if __name__ == "__main__":
    main()
