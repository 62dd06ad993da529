"""What faults are made of: wrong rules, drafters, models and steps; none is a product.

`audit.faults` names them and says where each comes from.
"""
