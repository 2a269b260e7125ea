"""The environment variables, flags and periods by which processes of the plugin know each other."""

# Every process of a trial inherits the attempt's id, and is so known for one whoever its parent is.
ATTEMPT_ID = "QUARTET_ATTEMPT_ID"
# Every process of a batch's job inherits the job's mark.
JOB_MARK = "QUARTET_BATCH_JOB"
# The folder where ranks outside of a trial leave rank-K.err.json: no launcher passes an exit code on.
ERRORS_FOLDER = "QUARTET_ERRORS"
# The conversion.json of `quartet convert`: ranks have no flag for it, because nobody starts them so by hand.
CONVERSION_FILE = "QUARTET_CONVERT"
# `quartet profile`: "1" where the ranks are real, RANK/WORLD_SIZE for one that is simulated alone.
PROFILE = "QUARTET_PROFILE"
# The start.json of a command whose training processes find themselves (protocol.training_start), and the
# folder of it in a process that has been started anew by it.
START, STARTED = "QUARTET_START", "QUARTET_STARTED"
# The user accepts that functions of the framework have another source than any release that was tried.
ACCEPT_CHANGED_SOURCE = "QUARTET_ACCEPT_CHANGED_SOURCE"
# A rank on a CPU that has started itself again with its allocator's settings.
CPU_REEXECUTED = "QUARTET_CPU_DEVICE_REEXECUTED"

# The newest instructions that oneDNN may use.
CPU_INSTRUCTIONS = "ONEDNN_MAX_CPU_ISA"
# What glibc, OpenMP and oneDNN read when a rank on a CPU starts.
CPU_SETTINGS = {
    # One thread a rank, which MKL and OpenBLAS obey too: ranks share the cores.
    "OMP_NUM_THREADS": "1",
    # Freed activations stay in the heap. By default glibc returns each to the kernel and faults it in again,
    # which costs as much as a bad layout.
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "67108864",
    # No matrix tiles: some virtual machines list them, and end the process at the first product in bf16. A
    # rehearsal also computes the same numbers on a machine that has none.
    CPU_INSTRUCTIONS: "AVX512_CORE_FP16",
}

# Flags of the entries in the ranks' command.
PLAN_FLAG, DEVICE_FLAG, TRIAL_FLAG = "--quartet-plan", "--quartet-device", "--quartet-trial"

# A rank looks this often whether its heartbeat has to be written.
HEARTBEAT_S = 1.0
# The holder of a run folder renews its lease, and a worker its claim; who has not for EXPIRY_S has lost it.
LEASE_RENEWAL_S, CLAIM_RENEWAL_S, EXPIRY_S = 20.0, 2.0, 120.0
