"""What is measured unless asked otherwise, without JAX: it starts only when the devices are chosen."""

from meshwright.notation.mesh import Mesh

# V in bytes, by steps of four: 1 KiB to 256 MiB to see all of a machine, and what a training step
# moves, from a norm to a bucket of gradients, to calibrate it.
SWEEP = tuple(1024 * 4**step for step in range(10))
CALIBRATION = (4096, 65_536, 262_144, 1_048_576, 4_194_304, 16_777_216, 33_554_432)


def group_mesh(num_devices: int) -> Mesh:
    """The mesh that calibrates: groups of neighbours, groups of devices far apart, and all of them.

    >>> dict(group_mesh(8).sizes), dict(group_mesh(3).sizes)
    ({'X': 4, 'Y': 2}, {'X': 3})
    """
    even = num_devices % 2 == 0 and num_devices > 2
    return Mesh({"X": num_devices // 2, "Y": 2} if even else {"X": num_devices})
