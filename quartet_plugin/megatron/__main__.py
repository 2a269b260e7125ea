"""`python -m quartet_plugin.megatron [-m MODULE | SCRIPT] ARGS...`: see `entry`."""

from quartet_plugin.megatron.entry import main

if __name__ == "__main__":
    main()
