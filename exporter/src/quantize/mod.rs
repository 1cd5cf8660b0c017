//! Turns dense weights into codes: which weight gets which encoding ([`Recipe`]), how scales and
//! zero points are chosen ([`Method`]), and how much is lost ([`TensorReport`]).

mod bundle;
mod device;
mod gpu;
mod hqq;
mod lanes;
mod min_max;
mod recipe;
mod recipe_file;
mod report;
mod row;
mod rows;
mod unfinished;

pub use bundle::{Existing, write_bundle};
pub use device::{QuantizeOn, Quantizer};
pub use recipe::{Codes, Group, Layers, Method, Recipe, Rule, Treatment};
pub(crate) use recipe::{EMBEDDING, HEAD, layer_of};
pub use report::{ClassReport, Loss, TensorReport, classes, json, summary, table};
pub(crate) use row::RowQuantizer;
pub(crate) use rows::{Quantized, Rows};
