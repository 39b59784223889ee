"""Plan a run without running it: what fits, which policy is chosen, what is predicted and what the simulator says."""
