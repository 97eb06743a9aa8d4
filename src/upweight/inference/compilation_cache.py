"""Where compiled programs are kept between processes."""

from __future__ import annotations

import os
from pathlib import Path


def use_compilation_cache(folder: str | Path) -> None:
    """Programs that take longer than 0.2 s to compile are kept in `folder`; JAX's own variable beats it."""
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
