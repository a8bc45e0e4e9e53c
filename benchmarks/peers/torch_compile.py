NAME = "torch_compile"
PIP = None


def comparisons(options):
    return iter(())
