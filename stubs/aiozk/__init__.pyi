from aiozk import exc as exc, protocol as protocol
