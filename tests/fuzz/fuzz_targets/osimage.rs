#![no_main]

vellum_fuzz::target!(osimage);
