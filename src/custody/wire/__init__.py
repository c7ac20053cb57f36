"""The JSON of the HTTP interface, once for the server and its clients: `…In` is sent to a server, `…Out` is its answer.

`value()` turns an answer into a value of the model. `of()` makes an answer of one, where speed or form require it;
otherwise `plain()` does, as for the other interfaces.
"""
