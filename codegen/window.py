def fits(spec):
    return "later"
def render(spec, schedule=None):
    raise NotImplementedError
