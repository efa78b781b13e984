"""Randomized smoothing (Cohen et al. 2019): certificates for any classifier. Knows nothing of privacy or training."""
