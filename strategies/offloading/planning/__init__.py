"""Choose the policy of an offloading system (MoE-Lightning section 4.2). This page is the map of the planner.

In the order in which to read:

    policy              the six numbers of Table 1, and which of them the user has given
    hrm                 the Hierarchical Roofline Model (section 3): rates of processors, memories and links
    linear_terms        a quantity that is linear in what a policy leaves open, once its micro-batch size is fixed
    memory              what a policy holds in each tier of memory, by name, in linear terms (the constraints)
    cost                how long a layer takes under a policy, in linear terms (Eq. 12-14)
    program             the policies of a range of micro-batch sizes as a mixed-integer program
    solver              the solution of such a program
    search              the policy with the most sequences a second that fits, from many such programs
    rate_probe          the rates of this machine, measured on ops of one layer
    planner             from an engine to a policy: the workload's shape and the rates, then the search
    micro_batch_memory  the sizes of the pipeline's buffers under the chosen policy
    prediction          what the model says of a whole run under a policy

What flows where:

    engine.sequences -> WorkloadShape -+
    engine.store     -> WeightSizes ---+-> Deployment -> memory: rows of bytes  -+
    engine.machine   -> rate_probe -> Rates ----------> cost: rows of seconds ---+-> search -> Policy -> prediction

Memory and time are written once: evaluated at a policy they are bytes and seconds, as rows of the program they are its
constraints. A search is exact for a fixed micro-batch size; micro-batch sizes are searched by branch and bound.
"""
