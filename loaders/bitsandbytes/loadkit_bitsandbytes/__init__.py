"""bitsandbytes: 4-bit and 8-bit weights, as checkpoints hold them or made while loading.

``availability`` whether the library is there, ``library`` the library itself, ``scheme`` how a
matrix is quantised, ``quant_state`` what a file says of one, ``survey`` all of a checkpoint's,
``table`` which module each belongs to, ``piece`` a rank's part of one, ``pieces_of`` the parts that
a layer holds, ``packed_parameter`` the parameter that takes a part, ``parts`` long work in
short parts, ``arithmetic`` numbers from
bytes and back, ``stored`` and ``online`` the methods of linear layers, ``eight_bit`` those of int8,
``experts`` those of mixtures, ``options`` and ``config`` what a user and a checkpoint say,
``misaligned`` what tp cuts inside a block, ``decode`` what no layer takes packed, ``loader`` the
loader.
"""
