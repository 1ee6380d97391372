"""Files by which sink_cluster.py and a task attempt that waits tell each other where they are; the
directory is named by a variable."""

ZOMBIE = "KDIRECT_ZOMBIE"
ARMED = "armed"  # says at which place (`kdirect.failpoints`); who renames it waits there
TAKEN = "taken"  # says which process is the executor of the one that waits
GO_ON = "go on"
ENDED = "ended"  # says what came of it
