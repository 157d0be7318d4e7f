"""Declared operations on a scene's arrays, for recordings on lanes."""

import handlepool


@handlepool.operation
def plus(scene, x, value):
    return scene.plus(x, value)


@handlepool.operation(mutates="y")
def times(scene, y, value):
    scene.put(y, lambda x: x * value, y)
