"""`python -m quartet_plugin.deepspeed SCRIPT ARGS...` runs a script: see `entry`."""

from quartet_plugin.deepspeed.entry import main

if __name__ == "__main__":
    main()
