//! Turns a Gemma 4 checkpoint into a program: `model.pte` and `model.ptd`.
//!
//! [`model`] is Gemma 4, written once against [`trace::Tensor`]; [`methods`] traces it, and
//! [`reference`] runs it with candle.

pub mod methods;
pub mod model;
pub mod reference;
pub mod trace;
