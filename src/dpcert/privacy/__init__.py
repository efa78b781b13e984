"""The privacy path: sampling, clipping, noise, accounting and the ledger; `mechanism` joins them."""
