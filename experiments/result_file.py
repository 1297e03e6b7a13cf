"""The result file of experiments: that of the kernels' benchmarks, with the library's error and its packages."""

from jllm.errors import OutputError
from pallas_kernels import result_file


class ResultFile(result_file.ResultFile):
    """Raises OutputError where it cannot be written."""

    packages = (*result_file.ResultFile.packages, "optax", "sentencepiece")

    def _write(self) -> None:
        try:
            super()._write()
        except OSError as error:
            raise OutputError(str(error)) from None
