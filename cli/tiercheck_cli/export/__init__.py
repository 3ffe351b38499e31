"""`tiercheck export`: what somebody who helps needs to see, without secrets."""
