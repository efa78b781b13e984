"""Custom models: ``package.module:factory``, imported only if the user typed the name."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ModelError

Shape = tuple[int, int, int]
Factory = Callable[[Shape, int], nn.Module]
HOW_TO_NAME = "package.module:factory"


def is_factory_name(name: str) -> bool:
    """Whether the name of a model is an import path; names of built-in models have no colon."""
    return ":" in name


def import_factory(name: str) -> Factory:
    """Import the function ``package.module:factory``; modules in the current folder are found too.

    Call this only with a name that the user typed on the command line, never with a name read from a file.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ModelError(f"--model is {name!r}, must be {HOW_TO_NAME}")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        target: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except ModuleNotFoundError as error:
        raise ModelError(f"--model {name}: module {error.name!r} was not found; check the name or PYTHONPATH") from error
    except AttributeError as error:
        raise ModelError(f"--model {name}: {error}; check the name after the colon") from error
    except Exception as error:  # importing the user's module may raise anything
        raise ModelError(f"--model {name}: the import failed: {_in_one_line(error)}; fix the module") from error
    finally:
        sys.path.remove(here)
    if here not in sys.path:
        sys.path.append(here)  # what the factory itself imports when it is called
    if not callable(target):
        raise ModelError(f"--model {name} is a {type(target).__name__}, must be a function of (input_shape, classes)")
    return target  # type: ignore[no-any-return]


def build_custom(factory: Factory, input_shape: Shape, classes: int, seed: int | None = None) -> nn.Module:
    """Build a model with a factory; `seed` fixes the initialization without changing the global generator."""
    name = getattr(factory, "__qualname__", type(factory).__name__)
    try:
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            model = factory(input_shape, classes)
    except Exception as error:  # the user's function may raise anything
        raise ModelError(
            f"the model factory {name}({input_shape}, {classes}) failed: {_in_one_line(error)}; "
            "it is called with (input_shape, classes)"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model factory {name} returned a {type(model).__name__}, must return an nn.Module")
    return model


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
