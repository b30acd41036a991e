"""Loss scaling: the scale, and the decision of all ranks to apply or skip a step."""
