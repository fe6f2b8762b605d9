"""What makes the core faster or smaller and changes no result beyond rounding.

Triton kernels, FlexAttention, products in eight bits, recorded passes, compact AdamW. install.py
puts what stands for functions of model.py there, in one call; nothing of the core needs it.
"""
