"""Loads optax at its first use, so --help of training commands does not need it."""

from typing import TYPE_CHECKING, Any

from jllm.errors import ConfigError, how_to_install

if TYPE_CHECKING:
    import optax as optax
else:

    class _Later:
        def __getattr__(self, name: str) -> Any:
            try:
                import optax as loaded
            except ImportError:
                raise ConfigError(f"training needs optax: {how_to_install('train')}") from None
            return getattr(loaded, name)

    optax = _Later()
