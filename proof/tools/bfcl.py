def check_functions(record, source):
    raise NotImplementedError
