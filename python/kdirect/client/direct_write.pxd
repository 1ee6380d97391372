"""Numbers of `FileWriter`: see direct_write.pyx."""

cdef enum:
    SINGLE_OVERHEAD = 128      # a batch of one record without headers: 61 + at most 7 varints

    # Values from so many bytes on are left to the transport to copy: below it a second copy is as
    # cheap as a reference to keep.
    INLINE_FROM = 8192

    C_SENT = 0
    C_NO_ROOM_FILE = 1         # the head file has no room, or access is recalled
    C_NO_ROOM_BUFFER = 2       # the send buffer or the window is full
    C_NOT_GRANTED = 3          # access has ended, or a request was refused
    C_BROKEN = 4
    C_SENT_AND_ASK = 5         # as SENT, and now is the time to ask for the next file

    DUPLICATE_SEQUENCE_NUMBER = 46   # committed before
