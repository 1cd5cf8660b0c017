use std::cell::RefCell;
use std::rc::Rc;

use candle_core::Device;
use gemma4_format::{Dim, Encoding, Extents};

use super::{Buffer, BufferRepr, Error, Result, Tables, Weight, WeightRepr};

/// What a weight of the checkpoint will be in the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightSpec {
    /// Extents.
    pub dims: Vec<u32>,
    /// How it will be stored.
    pub encoding: Encoding,
}

type Describe<'a> = Rc<dyn Fn(&str, Option<&[u32]>) -> Option<WeightSpec> + 'a>;
type Load<'a> = Rc<dyn Fn(&str) -> std::result::Result<Vec<f32>, String> + 'a>;

/// Where a model takes its weights and buffers from, by dotted names as in a checkpoint.
#[derive(Clone)]
pub struct Store<'a> {
    describe: Describe<'a>,
    mode: Mode<'a>,
    prefix: String,
}

#[derive(Clone)]
enum Mode<'a> {
    /// Names go into tables; no number is read.
    Traced(Rc<RefCell<Tables>>),
    /// Numbers are read and decoded to float32; buffers hold `context` tokens.
    Eager { load: Load<'a>, context: u32 },
}

impl<'a> Store<'a> {
    /// A store for tracing. `describe` tells the dims and encoding of a weight by its name and
    /// by the dims that the model wants; without the latter, whether there is such a weight.
    pub fn traced(
        describe: impl Fn(&str, Option<&[u32]>) -> Option<WeightSpec> + 'a,
        tables: Rc<RefCell<Tables>>,
    ) -> Self {
        Self { describe: Rc::new(describe), mode: Mode::Traced(tables), prefix: String::new() }
    }

    /// A store for eager runs; `load` reads a weight as row-major float32.
    pub fn eager(
        describe: impl Fn(&str, Option<&[u32]>) -> Option<WeightSpec> + 'a,
        load: impl Fn(&str) -> std::result::Result<Vec<f32>, String> + 'a,
        context: u32,
    ) -> Self {
        let mode = Mode::Eager { load: Rc::new(load), context };
        Self { describe: Rc::new(describe), mode, prefix: String::new() }
    }

    /// The store under `name.`.
    pub fn at(&self, name: impl std::fmt::Display) -> Self {
        Self { prefix: self.full_name(&name.to_string()) + ".", ..self.clone() }
    }

    /// Whether the checkpoint has a weight of that name.
    pub fn has(&self, name: &str) -> bool {
        (self.describe)(&self.full_name(name), None).is_some()
    }

    /// The weight of that name, which must have these dims.
    pub fn weight(&self, name: &str, dims: &[u32]) -> Result<Weight> {
        let name = self.full_name(name);
        let spec = (self.describe)(&name, Some(dims))
            .ok_or_else(|| Error::MissingWeight { name: name.clone() })?;
        if spec.dims != dims {
            return Err(Error::WeightShape { name, found: spec.dims, wanted: dims.to_vec() });
        }
        let repr = match &self.mode {
            Mode::Traced(tables) => {
                WeightRepr::Traced(tables.borrow_mut().weight(&name, dims, spec.encoding))
            }
            Mode::Eager { load, .. } => {
                let numbers = load(&name).map_err(|why| Error::Load { name: name.clone(), why })?;
                let shape: Vec<usize> = dims.iter().map(|d| *d as usize).collect();
                WeightRepr::Eager(candle_core::Tensor::from_vec(numbers, shape, &Device::Cpu)?)
            }
        };
        Ok(Weight { name, dims: dims.to_vec(), repr })
    }

    /// A new buffer of that name, zero at first.
    pub fn buffer(&self, name: &str, dims: [Dim; 3]) -> Result<Buffer> {
        let repr = match &self.mode {
            Mode::Traced(tables) => {
                BufferRepr::Traced(tables.borrow_mut().buffer(&self.full_name(name), &dims))
            }
            Mode::Eager { context, .. } => {
                let extents = Extents { rows: 1, context: *context };
                let shape = dims.map(|d| d.resolve(extents) as usize).to_vec();
                let zeros =
                    candle_core::Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu)?;
                BufferRepr::Eager(zeros)
            }
        };
        Ok(Buffer { dims: dims.to_vec(), repr })
    }

    fn full_name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}
