"""MoE-Lightning's system, which its siblings share: they differ in the schedule, and in what their policies may be.

config            the settings that all of them have
planning/         the policy: its six numbers, their costs and memory, and the search for the best
request_batching  which requests form a batch, and which of them a micro-batch (Algorithm 2)
batches_in_flight several batches at the same time, for GPUs that are stages of a pipeline
steps             the steps of the paper's Figure 6, in which schedules are written
gpu_attention     schedule S4 of Figure 6; the other schedules lie with the systems that are named for them
pipeline          runs a schedule, pass after pass
system            puts all of it together: from a given policy to a strategy
"""
