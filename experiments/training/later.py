"""optax, which is loaded when it is first used: --help of what trains does without."""

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
                raise ConfigError(f"training needs optax: {how_to_install('learn')}") from None
            return getattr(loaded, name)

    optax = _Later()
