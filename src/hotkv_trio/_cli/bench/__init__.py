"""``hotkv-trio bench``: what the runtime costs, as ratios to llama.cpp driven by hand, paired in one run.

One file a suite.  A suite measures its arms in turns, many times, so that whatever else the machine does falls on all
of them, and returns `Findings`.
"""
