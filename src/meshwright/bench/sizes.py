"""Default sizes and mesh of measurements. Without JAX, which starts only when the devices are chosen."""

from meshwright.notation.mesh import Mesh

# V in bytes. A sweep goes from 1 KiB to 256 MiB by factors of four, to see the whole range of a machine.
# A calibration measures the sizes of a training step, from a norm to a bucket of gradients.
SWEEP = tuple(1024 * 4**step for step in range(10))
CALIBRATION = (4096, 65_536, 262_144, 1_048_576, 4_194_304, 16_777_216, 33_554_432)


def group_mesh(num_devices: int) -> Mesh:
    """The mesh of a calibration, for collectives among neighbours, among distant devices and among all.

    >>> dict(group_mesh(8).sizes), dict(group_mesh(3).sizes)
    ({'X': 4, 'Y': 2}, {'X': 3})
    """
    even = num_devices % 2 == 0 and num_devices > 2
    return Mesh({"X": num_devices // 2, "Y": 2} if even else {"X": num_devices})
