"""Chains of layers as machine code: compiled for one model where a C++ compiler exists (`chain.cpp`)."""
