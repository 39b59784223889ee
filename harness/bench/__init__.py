"""Time ops of one layer over micro-batches of chosen shapes: what calibration, profilers and policy searches use."""
