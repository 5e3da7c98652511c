"""Everything that is not the optimizer: data, networks, runs, baselines, timing, the paper, its page, the commands."""
