"""Environment variables that are settings of a run, and those of ms-swift that are not used."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from landfall.sft.flags import spec

environment_flag = partial(spec.flag, "Environment")

PORT = spec.Check("a port from 1 to 65535", lambda value: 1 <= value <= 65535)
CONNECTIONS = spec.Check("a whole number from 1 to 32", lambda value: 1 <= value <= 32)
DEVICE = re.compile(r"\d+|-1|GPU-[\w-]+|MIG-[\w/-]+")
ALLOCATOR_SETTING = re.compile(r"\w+:(\[[^\]]+\]|[^,\[\]]+)")
ALLOCATOR_SETTINGS = re.compile(f"({ALLOCATOR_SETTING.pattern})(,({ALLOCATOR_SETTING.pattern}))*")


def _are_devices(text: str) -> bool:
    """An empty text hides all devices; a device that is listed twice hides all of them by mistake."""
    devices = [device.strip() for device in text.split(",")] if text else []
    return all(DEVICE.fullmatch(device) for device in devices) and len(set(devices)) == len(devices)


DEVICES = spec.Check("devices such as 0,1,2, each once", _are_devices)
ALLOCATOR = spec.Check(
    "settings such as expandable_segments:True",
    lambda text: text == "" or ALLOCATOR_SETTINGS.fullmatch(text.replace(" ", "")) is not None,
)


@dataclass(frozen=True)
class EnvironmentFlags:
    """What a run takes from the environment."""

    image_max_token_num: int = environment_flag(
        16384,
        "The most tokens an image becomes; a token is 32 x 32 pixels, and a larger image is scaled down.",
        env="IMAGE_MAX_TOKEN_NUM",
        check=spec.COUNT,
    )
    nproc_per_node: int = environment_flag(
        1,
        "Ranks on this node. With it or NNODES the ranks are started by torchrun; with neither there is one "
        "rank. There may be more ranks than GPUs, and fewer.",
        env="NPROC_PER_NODE",
        check=spec.COUNT,
    )
    nnodes: int = environment_flag(1, "Nodes that train together.", env="NNODES", check=spec.COUNT)
    node_rank: int = environment_flag(
        0, "Which of the nodes this is; needed on several nodes.", env="NODE_RANK", check=spec.COUNT_OR_ZERO
    )
    master_addr: str = environment_flag(
        "127.0.0.1",
        "The address of node 0; needed on several nodes.",
        env="MASTER_ADDR",
        check=spec.ADDRESS,
    )
    master_port: int | None = environment_flag(
        None,
        "A free port on node 0, the same on all nodes.",
        env="MASTER_PORT",
        check=PORT,
        default_text="a free one; 29500 on several nodes",
    )
    cuda_visible_devices: str | None = environment_flag(
        None,
        "The GPUs of this node that may be used. Rank n takes the n-th; it may list more than there are "
        "ranks.",
        env="CUDA_VISIBLE_DEVICES",
        check=DEVICES,
        default_text="all",
        cpu="no: no GPU is used; an empty value makes CPU ranks on a node with GPUs",
    )
    pytorch_cuda_alloc_conf: str | None = environment_flag(
        None,
        "Settings of torch's memory allocator.",
        env="PYTORCH_CUDA_ALLOC_CONF",
        check=ALLOCATOR,
        default_text="torch's",
        cpu="no: it is the CUDA allocator's",
        gpu="yes: read by torch",
    )
    cuda_device_max_connections: int = environment_flag(
        1,
        "Hardware queues of a GPU. 1 keeps kernels in the order in which they were launched, which "
        "overlapped communication relies on.",
        env="CUDA_DEVICE_MAX_CONNECTIONS",
        check=CONNECTIONS,
        cpu="no: it is the CUDA driver's",
        gpu="yes: read by the CUDA driver",
    )
    omp_num_threads: int | None = environment_flag(
        None,
        "Threads that a rank computes with on the CPU.",
        env="OMP_NUM_THREADS",
        check=spec.COUNT,
        default_text="cores / ranks on this node",
        gpu="for what a rank does on the CPU, such as checksums and images",
    )
    use_hf: bool = environment_flag(
        False,
        "Look up ids of models on Hugging Face even if the modelscope package is installed.",
        env="USE_HF",
    )


@dataclass(frozen=True)
class UnusedVariable:
    """A variable that ms-swift reads for Qwen3-VL and landfall does not."""

    name: str
    default: str
    do: str = ""
    """What to set instead. Without it the variable concerns videos only, and is noted, not refused."""


UNUSED_VARIABLES = (
    UnusedVariable("MAX_PIXELS", "", "set IMAGE_MAX_TOKEN_NUM to MAX_PIXELS / 1024"),
    UnusedVariable("MIN_PIXELS", "", "unset it; the processor of the model decides"),
    UnusedVariable("IMAGE_MIN_TOKEN_NUM", "4", "unset it; the processor of the model decides"),
    UnusedVariable("SPATIAL_MERGE_SIZE", "2", "unset it; the model's config.json decides"),
    UnusedVariable(
        "MAX_RATIO", "200", "unset it; the longer side of an image may be 200 times the shorter one"
    ),
    UnusedVariable("VIDEO_MIN_TOKEN_NUM", "128"),
    UnusedVariable("VIDEO_MAX_TOKEN_NUM", "768"),
    UnusedVariable("VIDEO_MAX_PIXELS", ""),
    UnusedVariable("FRAME_FACTOR", "2"),
    UnusedVariable("FPS", "2"),
    UnusedVariable("FPS_MIN_FRAMES", "4"),
    UnusedVariable("FPS_MAX_FRAMES", "768"),
)
