"""LLaPor (PreScope §4.2) learns from recorded routing which experts a layer will need, one layer before.

Torch is imported only where predictors are trained or run."""
