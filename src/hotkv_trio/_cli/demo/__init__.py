"""``hotkv-trio demo``: sessions together on one model, each held against its run alone."""
