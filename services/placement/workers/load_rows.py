"""What is kept of a worker's load: the rows of `Workloads`, one number per worker each. Pure data."""

from __future__ import annotations

(
    RATE,  # prefill tokens/s, as reported; 0: not measured
    RATE_AT,  # when it was last another one
    BACKLOG,  # prompt tokens queued, as of AT
    AT,  # when the fluid rows (BACKLOG, RECENT) were last set
    REQUESTS,  # waiting, running and booked
    SLOTS,
    STAY,  # seconds from start to end of a request
    RECENT,  # prompt tokens given lately, as of AT
    CREDIT,  # what share of the blocks that it is said to hold is believed
    TOKEN_BYTES,  # of K and V, as restored
    BLOCKS_USED,
    BLOCKS,
    BLOCK_TOKENS,
    TOKEN_S,  # seconds per decoded token, all its sequences together; 0: not measured
    STEP_S,  # seconds per decode step; 0: not measured
    OUTPUT,  # tokens that a request generates
    AHEAD,  # of BACKLOG, what comes before a request of the priority in question; set in views
    AHEAD_REQUESTS,  # the same of REQUESTS
) = range(18)
COUNT = 18
NEVER_NEGATIVE = [RATE, BACKLOG, REQUESTS, SLOTS, STAY, RECENT, CREDIT, STEP_S, OUTPUT]
