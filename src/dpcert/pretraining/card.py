"""Write the pretrained weights and their model card: public data, noise, settings, accuracy."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch

from ..models.feature_cnn import Backbone
from ..store.durable import canonical_json, sha256_hex, write_atomically
from ..store.weights import with_sorted_header
from .images import NOISE_LAW, PublicImages
from .settings import Settings


def write(out: Path, model: Backbone, settings: Settings, data: PublicImages, facts: dict[str, Any]) -> dict[str, Any]:
    """Write the weights with the card in their header, and the card as Markdown; return the card."""
    card = {
        "format": 1,
        "model": settings.model,
        "input_shape": list(data.shape),
        "public_classes": list(data.classes),
        "removed_near_duplicates": data.removed,
        "noise": NOISE_LAW,
        "settings": settings.as_dict(),
        **facts,
    }
    tensors = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    metadata = {"dpcert_card": canonical_json(card), "data_sketch": canonical_json(data.sketch)}
    body = with_sorted_header(safetensors.torch.save(tensors, metadata=metadata))
    write_atomically(out, body)
    write_atomically(out.with_suffix(".md"), _page(out.name, card, sha256_hex(body)).encode())
    return card


def _page(name: str, card: dict[str, Any], digest: str) -> str:
    """The card as Markdown."""
    rows = "\n".join(f"| {sigma} | {100 * share:.1f} |" for sigma, share in card["accuracy"].items())
    return f"""# {name}

A `{card["model"]}` backbone, pretrained **without privacy** on public images under Gaussian noise.
Private fine-tuning starts from it.

| | |
|---|---|
| weights, SHA-256 | `{digest}` |
| public data | {card["data"]} |
| license of the data | {card["license"]} |
| data, SHA-256 of the images | `{card["data_sha256"]}` |
| images used | {card["images"]:,} ({card["removed_near_duplicates"]:,} near-duplicates of CIFAR-10 left out) |
| classes | {" + ".join(map(str, card["public_classes"]))} |
| noise | {card["noise"]} |
| epochs, steps | {card["settings"]["epochs"]}, {card["steps"]:,} |
| settings | `{json.dumps(card["settings"])}` |

Accuracy on held-out public images, one draw of noise each:

| sigma | accuracy, % |
|---|---|
{rows}
"""
