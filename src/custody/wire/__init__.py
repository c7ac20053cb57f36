"""The JSON of the HTTP interface, once for the server and its clients: `…In` is sent to a server, `…Out` is its answer.

Answers turn back into values of the model by `value()`. What is sent often is made of them by `of()`; for the rest
`plain()` does it, as for every other door.
"""
