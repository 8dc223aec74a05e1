def renewed(store, root):
    return {}
