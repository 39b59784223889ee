"""Run ops on threads of this computer: the lanes of the emulated machine, and the host's lanes of the CUDA machine."""
