"""One file of JSON and tensors: the safetensors format, with a checksum over all that counts.

The header of a safetensors file may hold strings beside its tensors. Here they are ``format`` and ``format_version``;
``document``, the JSON; ``complex``, names of tensors stored as pairs of real numbers; and ``sha256`` of the document
and of the name, dtype, shape and bytes of every tensor. A damaged file is an error: it is never read as another one.
The format: https://huggingface.co/docs/safetensors.
"""

import hashlib
import json
import os
import uuid
from typing import Any

import safetensors
import safetensors.torch
import torch

__all__ = ["read_file", "write_file"]

FORMAT = "lmfit_gpu estimator"
FORMAT_VERSION = "1"
LENGTH_BYTES = 8  # of the header, little-endian, at the beginning of the file


def write_file(path: str | os.PathLike[str], document: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file, whole or not at all: a file of that name is replaced at the end, at once.

    Raises
    ------
    ValueError
        If the format has no place for a tensor's dtype.
    OSError
        If the file cannot be written.
    """
    stored = {name: _stored(tensor) for name, tensor in tensors.items()}
    text = json.dumps(document, allow_nan=False)
    pairs = json.dumps(sorted(name for name, tensor in tensors.items() if tensor.is_complex()))
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "document": text,
        "complex": pairs,
        "sha256": _checksum(text + pairs, stored),
    }
    try:
        data = safetensors.torch.save(stored, metadata)
    except (KeyError, ValueError, safetensors.SafetensorError) as error:
        dtypes = sorted({str(tensor.dtype) for tensor in stored.values()})
        raise ValueError(f"save: safetensors does not hold one of the dtypes {', '.join(dtypes)}: {error}") from error
    target = os.path.realpath(path)
    partial = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{uuid.uuid4().hex}.part")
    try:
        with open(partial, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        if os.path.exists(partial):
            os.unlink(partial)
        raise


def read_file(path: str | os.PathLike[str]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the document and the tensors of a file.

    Raises
    ------
    ValueError
        If it is not such a file, of another version of the format, or damaged.
    OSError
        If it cannot be read.
    """
    with open(path, "rb") as file:
        data = file.read()
    try:
        stored = safetensors.torch.load(data)
        metadata = json.loads(data[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")])
        metadata = metadata.get("__metadata__", {})
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        what = "damaged, or cut off" if FORMAT.encode() in data else "not a file that est.save wrote"
        raise ValueError(f"{os.fspath(path)}: {what} ({error})") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{os.fspath(path)}: a safetensors file, but not one that est.save wrote, or damaged")
    if metadata.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{os.fspath(path)}: version {metadata.get('format_version')!r} of the format; this lmfit_gpu reads "
            f"{FORMAT_VERSION!r}: install a newer one, or the file is damaged"
        )
    text, pairs = metadata.get("document", ""), metadata.get("complex", "")
    if _checksum(text + pairs, stored) != metadata.get("sha256"):
        raise ValueError(f"{os.fspath(path)}: damaged: its checksum is not that of its content")
    pairs = json.loads(pairs)
    tensors = {name: torch.view_as_complex(part) if name in pairs else part for name, part in stored.items()}
    return json.loads(text), tensors


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU with memory of its own (safetensors refuses shared memory)."""
    tensor = tensor.detach().cpu()
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.clone(memory_format=torch.contiguous_format)


def _checksum(text: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
