"""Loaded once by the server that the victims are forked from: imports and calibration are not paid for at every kill."""

import dpcert.experiment.run
from dpcert.certification import compiled
from dpcert.privacy import accounting
from tests.faults import scene, victim

__all__ = ["compiled", "dpcert", "victim"]
accounting.calibrate(epsilon=3.0, delta=1e-5, sampling_probability=6 / 24, steps=scene.STEPS)
